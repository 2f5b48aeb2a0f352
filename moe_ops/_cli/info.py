from moe_ops import _register
def missing(op,key): return _register.MISSING.get((op,key),"")
