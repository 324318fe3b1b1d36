"""What attention's GPU kernels take, in Triton and in CUDA C++; csrc/attention/limits.h says the same in C++."""

MOST_HEAD_DIM = 256
MOST_DECODE_QUERIES = 16  # more are no decoding
