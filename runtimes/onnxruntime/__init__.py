"""ONNX Runtime: profile a plain ONNX model, and run it as a mixed-precision graph under a plan; inference only."""
