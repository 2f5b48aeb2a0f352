// The argument checks and their texts are those of the CPU library, which exports no C++.
#include "cpu/check.cpp"
