// Decoding products with bf16 weights and activations.
#include "decode_product.cuh"

DECODE_PRODUCTS(decode_bf16_dense, false, kFloat, 2, 4096)
DECODE_PRODUCTS(decode_bf16_gate_up, false, kSwiGlu, 2, 4096)
DECODE_PRODUCTS(decode_bf16_down, false, kWeighted, 2, 3072)
DECODE_CUT(decode_bf16_dense_half, false, kFloat, 4096)
DECODE_CUT(decode_bf16_dense_quarter, false, kFloat, 2048)
DECODE_CUT(decode_bf16_down_half, false, kWeighted, 3072)
DECODE_CUT(decode_bf16_down_quarter, false, kWeighted, 1536)
