"""The paper's experiments (and what goes beyond them), side by side with their peers: `python -m bench.experiments`.

| group | what | at least, aim |
|---|---|---|
| square | 16-bit squares: rows of `bench.hopper` (Fig. 8 has f32 results; not among the default ones) | 0.96, 1.0 |
| diagonal | diagonal x dense and dense x diagonal, f16, against cuBLAS on the materialised matrix (Table 1) | 5, 8 |
| triangular | triangular x dense, f16, against cuBLAS on the matrix with its zeros | 1.6, 1.9 |
| symmetric | X X^T in both halves, of which one is computed, against cuBLAS's product | 1.7, 2 |
| fusion | the six rows of Table 2 against cuBLAS and element-wise kernels | first 0.98, 1.05; last 1.4, 1.55 |
| algebras | complex and dual numbers of f16 against as many real products by cuBLAS (Fig. 9) | 0.7, 0.95 |
| complex64 | complex64 without tf32 against cuBLAS | 0.7, 1.0 |
| minplus | min-plus f32 against the card's own limit for adds and minima, which is measured | 0.6, 0.9 |
| rivals | works of the papers against Triton, PyTorch eager, scripted, compiled, cuDNN (when asked for) | |
| mixed | f16 A and B, f32 C and D, D = A B + C, against cuBLASLt of these types (Fig. 8; when asked for) | 0.95, 1.0 |
| wmma | the same by the WMMA operator (when asked for) | |
| mixed_diagonal, mixed_fusion | Tables 1 and 2 with f32 C and D (when asked for) | 5, 6.4; the paper's ratios |
| mixed_algebras, mixed_contraction | Fig. 9 and Table 3 with f32 C and D (when asked for) | 0.95, 0.85 at 4096 |
| contraction | D_abc = A_bda B_dc at the paper's sizes against torch.einsum (Table 3) | mean 1.1, 1.5 |
| tccg | the 48 contractions of the TCCG benchmark, f16 and f32, against torch.einsum | mean 1.1, 1.5 |
| grouped | 32 products of random sizes in one launch against a loop of cuBLAS (not among the default ones) | 1.5, 3 |
| stacks | stacks of small products in one launch against torch.bmm (not among the default ones) | 0.77, 0.93 |
| float32, float64, complex | squares off the 16-bit road, against cuBLAS (not among the default ones) | mean 0.98, 1.05 |
| long, skinny | few tiles with a long K; 1 to 32 rows (not among the default ones) | mean 0.95, 1.2; 1.0, 1.15 |
| some | 40 to 256 rows, or columns (not among the default ones) | mean 0.95, 1.1 |
| decode | 1 to 32 rows with an epilogue, against cuBLAS and element-wise kernels (not among the default ones) | 1.0, 1.3 |
| experts, sparse | against torch._grouped_mm; against cuBLAS on the whole matrix (when asked for) | |
| forced | f16 by mma.sync against the card's rate of it on registers (not among the default ones) | 0.72, 0.85 |
| attention, attention_short | attention against cuDNN (not among the default ones) | mean 1.08, 1.2; 0.95, 1.1 |
| attention_rules | attention with masks and scores against FlexAttention (not among the default ones) | mean 1.2, 1.6 |
| mlp | MLPs of 4, 8 and 20 layers against a call of cuBLASLt a layer (not among the default ones) | 20: 2.4, 5 |
| programs | a GEMM as a program, by blocks alone and in clusters, against cuBLAS (not among the default ones) | |
| decompositions | schedules 1 to 3 of docs/specs.md against cuBLAS (not among the default ones) | |
| listings | both of Fireiron's, against a template of the same tiles, and cuBLAS (not among the default ones) | 1.0, 1.1 |
| staged | one schedule of tensor cores, tiles in shared memory plain, padded, swizzled, a step ahead (when asked for) | |
| fused_specs | MLPs, an LSTM cell, layer norms and attention as specs, against PyTorch (when asked for) | |
| small | M = N = 16 to 512: schedules and matmul against cuBLAS (not among the default ones) | mean 1.1, 1.3 |
| streamk | stream-K and the default mapping at sizes of a nearly empty last wave (not among the default ones) | |

diagonal, triangular, symmetric and fusion are cases of `bench.cases`; the others are each an `experiment.Experiment`:
algebras, minplus (and limit, the kernel that measures the card's), forced (and tensor_limit), contractions, groups, mixed,
mlp, programs, specs, stacks, stream_k, types, versus.
"""
