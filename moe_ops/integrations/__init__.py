"""What connects the operators to files and frameworks. Nothing else in the package imports from here.

- `checkpoints`: MXFP4 expert weights in safetensors files, under the names that published models use.
- `gguf`: MXFP4 expert weights in GGUF files.
- `dense`: cut a dense SwiGLU layer into experts.
- `quantize`: quantise to MXFP4 with calibration inputs.
- `transformers`: the experts implementation "moe_ops" of the transformers library.
"""
