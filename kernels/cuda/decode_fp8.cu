// Decoding products with e4m3 weights, a scale for each of their rows, and f16 activations.
#include "decode_product.cuh"

DECODE_PRODUCTS(decode_fp8_dense, true, kFloat, 1, 4096)
DECODE_PRODUCTS(decode_fp8_gate_up, true, kSwiGlu, 1, 4096)
DECODE_PRODUCTS(decode_fp8_down, true, kWeighted, 1, 3072)
DECODE_CUT(decode_fp8_dense_half, true, kFloat, 2048)
DECODE_CUT(decode_fp8_down_half, true, kWeighted, 1536)
