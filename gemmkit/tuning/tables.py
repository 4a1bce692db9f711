"""The mappings that are chosen among, as numbers: tiles, how warps share them, and what they cost, as measured.

`gemmkit.tuning.sm90` reads rows of Hopper's kernel as `gemmkit.tuning.model.CostedTile`, `gemmkit.tuning.sm80` those of
the multistage kernel as `Multistage`, and `gemmkit.tuning.simt` those of the single-stage kernel.
"""

from __future__ import annotations

# -- Hopper's kernel --------------------------------------------------------------------------------------------------
#
# A row: M, N, schedule, warps that multiply, cluster; cycles of a k-tile, of a tile's end, and of the kernel's beginning.

#: What stands for all of them where the kernel is asked how operands travel.
LIKELY = (128, 128, "cooperative", 8, (1, 1), 560, 6500, 0)

# Roughly from the fastest on a large problem to the smallest.
MAPPINGS = (
    (128, 192, "pingpong", 8, (1, 1), 790, 2500, 2000),
    (128, 256, "cooperative", 8, (1, 1), 1046, 6000, 0),
    # (4096^3 nn, tn, nt on an H200, 2026-11-24: 128x256 takes 0.97, 0.97 and 0.99 of its time.)
    (128, 128, "pingpong", 8, (1, 1), 545, 1200, 2000),
    (256, 128, "cooperative", 8, (1, 1), 1046, 6000, 0),
    (64, 128, "pingpong", 8, (1, 1), 300, 1200, 2000),
    (64, 64, "cooperative", 4, (1, 1), 200, 2500, 0),
    (64, 32, "cooperative", 4, (1, 1), 160, 2200, 0),
)
# Beside them for windows of convolutions, which often have 64 filters or 32. What tensor cores read of shared memory and TMA
# writes there (128 bytes a cycle) decides the steps. (f16, 32 images of 56 x 56 x 64, 64 filters of 3 x 3, H200, 2026-11-28:
# 19.4 us by the first, 20.3 by the second, 22.4 by 64x64 in ping-pong, 41.1 by 128x128; cuDNN 27.8. 28 x 28 x 128, 128
# filters, 2026-11-30: 18.3 us by the first, 14.4 by 64x128, 15.7 by 128x128; cuDNN 17.3. 64^3 positions of 32 channels, 32
# filters of 3^3: 313 by the last, 347 by the third, cuDNN 242.)
WINDOWS = (
    (128, 64, "pingpong", 8, (1, 1), 405, 1000, 2000),
    (256, 64, "cooperative", 8, (1, 1), 780, 3500, 0),
    (128, 32, "pingpong", 8, (1, 1), 300, 900, 2000),
    (256, 32, "cooperative", 8, (1, 1), 470, 2200, 0),
)
# Cycles that storing an element of D takes where the positions of windows do not follow each other in memory (gradients of a
# convolution with a stride: 28 x 28 of 56 x 56 positions, 128 channels, 3 x 3: 24.9 us by 64x128, 28.6 by 128x128).
WINDOWS_STORED = 0.15
# In their place where taps share the lines of shared memory; the cycles are of 64 elements of K, whatever a stage has. (64^3
# positions of 32 channels, 32 filters of 3^3, H200, 2026-11-30: 135 us by the first, 141 by the second, 160 by the third,
# 214 by 128x32 in ping-pong, 305 where taps share nothing; cuDNN 258.)
SLIDING = (
    (512, 32, "cooperative", 8, (1, 1), 880, 2200, 0),
    (384, 32, "cooperative", 12, (1, 1), 640, 2200, 0),
    (256, 32, "cooperative", 8, (1, 1), 470, 2200, 0),
    (128, 32, "pingpong", 8, (1, 1), 354, 900, 2000),
)
SLIDING_BYTES = 2**15                  # of a tile of A in a stage, without the lines for taps: with more, few stages fit
# The same by way of a workspace, in tiles as wide as the taps: rows; cycles of a column, a k-tile. (32^3 positions of 64
# channels, 64 filters of 3^3: 46 us by 64x192, 81 where taps share nothing; cuDNN 90 to 98.)
SLIDING_WORKSPACE = ((64, 2.1),)
# Behind them, with stages of two lines. A line of so small a tile takes a warpgroup less time than the hand-over of its
# stage: two a stage (384 x 320 x 944, clusters of 2x2: 3.65 us, 4.34 with one; 192 x 192 x 321: 2.10, 2.31). Along a long K
# it is no gain: 33 x 64 x 2504 takes 6.06 us, and 4.30 in 8 shares of 64 x 128.
DEEP = ((64, 32, "cooperative", 4, (1, 1), 145, 2200, 0),)

# Cycles that folding two parts adds to a tile's end. Cooperating consumers wait for what is folded: 4096^3 takes 458
# us by 128x256, 415 by 128x128 in ping-pong; and of the latter large tiles fold longer (433 by 128x192; H200, 2026-11-26).
FOLDING = {(128, 256): 7000, (256, 128): 7000, (128, 192): 2000}

# Of interleaved columns that lie along K, beside the others: few rows by 2 x 14336 columns are 256 tiles of it, which take
# two turns of 132 blocks as 224 of 128 columns do, each shorter (K 4096: 73.1 us after 79.0 with 1 row, 71.3 after 77.2
# with 64; H200, 2026-11-30).
BRAIDED = ((64, 112, "pingpong", 8, (1, 1), 272, 1200, 2000),)

# Columns, rows and K of products with tiles as wide as they are (`fitted_tiles`); columns of D's narrowest lines, of which
# such tiles have a multiple; up to how many a stage of a tile of 64 rows has two lines.
FEWEST, WIDEST, LEAST_ROWS, LEAST_K = 65, 256, 2048, 1024
PIECE, DEEPEST = 16, 112
# What such products cost (`CostedTile.fetching`): cycles of a launch and of a wave; bytes a cycle of memory, of the L2, and
# that a multiprocessor takes; cycles of an element of a tile, a k-tile; of an exchange of sums, and of an element of them.
# Fitted to 250 times of 72 to 256 rows by 2048 to 28672 columns (H200, 2026-11-30): off by 10 %, and the mappings that it
# chooses take 1.01 of the time of the best tried.
FETCHING = 2130, 2240, 2510, 11640, 94, 1.81 / 64, 109, 0.5

# Beside them where rows begin at lines of the L2: tiles between those above, for what fills a wave of neither. Three
# consumers share 192 rows. (f16 squares on an H200, 2026-11-24: 1536 takes 13.3 us by 128 tiles of 192x96 and 15.3 by 96 of
# 128x192, 1152 7.14 by 64x192 and 8.46, 1792 20.7 by 128x224 and 21.1, 768 4.12 by 64x96 and 4.20.) Most have panels of B or
# D that are 32 elements wide: between lines of the L2, TMA fetches these at two thirds of the speed (12992 x 384 x 1811 tn,
# 128x224: 58 us where 42 are modelled).
ALIGNED = (
    (128, 224, "cooperative", 8, (1, 1), 940, 5500, 0),
    (192, 96, "cooperative", 12, (1, 1), 700, 3500, 0),
    (64, 192, "pingpong", 8, (1, 1), 440, 1300, 2500),
    (64, 96, "cooperative", 4, (1, 1), 300, 2700, 0),
)

# Beside these of plain operands, for few columns (100352 x 64 x 256: 17.7 us, 19.3 by 128x128; x 64 x 1024 53.1, 58.8 by
# 192x96; but 16384 x 64 x 1024 10.8, 10.3 by 64x64, and 65536 x 32 x 1024 35.1, 34.1 by 64x32; H200, 2026-11-30).
FEW_COLUMNS = ((128, 64, "pingpong", 8, (1, 1), 520, 1000, 2000),)
# Beside these if there is a C: two warpgroups finish a tile, where one of ping-pong's would (1024^3 into float32: 7.34 us,
# 8.0 by 64x128; H200, 2026-11-30).
WITH_C = ((128, 64, "cooperative", 8, (1, 1), 300, 3000, 0),)

# Beside them where rows do not begin at lines of the L2, so that an operand's tile is two lines a row: blocks of a cluster
# share what is fetched. Where rows do begin there, waiting for each other costs more than it saves.
# (On an H200, 2026-11-23: 1216 x 406 x 1544 takes 14.5 us by tiles of 64 x 128 and 9.1 by clusters of 2x2 of 128 x 64;
# 224 x 7312 x 7560 52.4 and 46.9 by 2x2 of 128 x 128; 384 x 320 x 944 4.4 and 3.65 by 2x2 of 64 x 32.)
NARROW = ((128, 64, "cooperative", 8, (1, 1), 300, 3000, 0),)
# Three consumers fetch less for a tile of 192x192 (3000^3 nt: 95 us, 99 by two), and have the rows of 10000 x 128 x 10000 nn
# in one wave (192x64: 61.9 us, 67.9 in shares of K).
THREE = (
    (192, 192, "cooperative", 12, (1, 1), 1180, 6000, 0),
    (192, 64, "cooperative", 12, (1, 1), 400, 4500, 0),
)
# Two of `ALIGNED` where they leave less of a tile empty (216 x 12256 x 4664 nt: 48.5 us by 2x2 of 128x224, 66.9 by 1x2 of
# 128x192; 3360 x 88 x 1360 tt 6.8 by 64x96 and 8.4 by 2x1 of 64x64).
BETWEEN = tuple(row for row in ALIGNED if row[:2] in ((128, 224), (64, 96)))
# The clusters of these tiles, by M, N and lines of a stage; of the others all three.
CLUSTERS = {(128, 192, 1): ((1, 2), (2, 1)), (128, 224, 1): ((2, 1), (2, 2)), (64, 96, 1): ((1, 1), (2, 1)),
            (128, 256, 1): ((2, 2), (2, 1)), (256, 128, 1): ((2, 2), (1, 2)),
            (64, 32, 1): (), (64, 32, 2): ((2, 2),), (192, 192, 1): ((1, 2), (2, 1)), (192, 64, 1): ((1, 2),)}
ALL_CLUSTERS = (1, 2), (2, 1), (2, 2)

# Where K is long and there are few tiles, the blocks of a cluster share it, and exchange their sums at the end.
SHARES = 2, 4, 8
SPLIT = (
    (128, 128, "cooperative", 8, (1, 1), 560, 6500, 0),
    (64, 128, "cooperative", 4, (1, 1), 330, 5500, 0),
)
# Smaller tiles as well. Of 8-bit operands and of tf32 the first, in 2 or 4 shares; its k-tiles take what those of whole
# tiles take. (e4m3 on an H200, 2026-11-28: 512 x 64 x 3216 4.5 us by four shares of these, 5.2 by eight of 64x128; 896 x 32
# x 15792 9.0 and 12.6.) Of 16-bit ones as many shares as D's lines have pieces. (f16 to f32, H200, 2026-11-30:
# 64 x 64 x 2048 takes 3.1 us by the second, 3.2 by the first, 4.5 in one share; x 4096 3.8, 3.6 and 7.5, 4.8 by 64x128;
# 256 x 1024 x 6272 to f16 11.2 us in two shares of the first, 13.5 in one of 64x32.)
SMALL_SPLIT = (64, 64, "cooperative", 4, (1, 1), 200, 3500, 0)
SMALL_SHARES = (((64, 64, "cooperative", 4, (1, 1), 205, 3900, 0), 1, (2, 4, 8)),       # lines of a stage; shares
                ((64, 32, "cooperative", 4, (1, 1), 150, 3400, 0), 2, (4,)))
SMALL_SHARED = 7000                    # bytes a cycle that the L2 gives their blocks: neighbours read the same lines at once
LEAST_SMALL = 8                        # k-tiles
# Cycles of a k-tile of 128 and of 64 rows of them where producer warps stage or rewrite an operand, or start copies.
STAGED_STEPS, COPIED_STEPS = {128: 1300, 64: 1000}, {128: 1265, 64: 1000}
# The same, by rows and columns, where tiles are transposed in place, A is fetched as it lies, or sums are promoted.
TRANSPOSED_STEPS = {(128, 128): 1400, (64, 128): 1100, (64, 64): 860}
ACROSS_STEPS = {(128, 128): 1100, (64, 128): 1000, (64, 64): 810}
PROMOTED_STEPS = {(128, 128): 600, (64, 128): 400, (64, 64): 300}

# The same by way of a workspace, with any number of shares, from so many k-tiles on; clusters multicast operands
# (`by_workspace` says how many). Fitted to an H200 (2026-11-22): f16 512 x 512 x 16384, 256 x 256 x 32768, 64 x 64 x 65536,
# 128 x 128 x 16384, and 96 x 2048 x 8192, each with 3 to 132 shares; to 15 % on average.
LEAST_SHARED = 32
WORKSPACE = tuple((M, N, "cooperative", warps, cluster, step, 8000, 0)
                  for M, N, warps, step in ((128, 128, 8, 560), (64, 128, 4, 330), (64, 64, 4, 200))
                  for cluster in ((1, 1), (2, 1), (1, 2), (2, 2)) if N == 128 or cluster == (1, 1))
# Beside them for gradients of few filters: the L2's bandwidth is the limit, and it gives each window once (32^3 positions of
# 64 channels, 64 filters of 3^3, H200, 2026-11-29: 84 us by 64x192, 97 by 64x256, 109 by 64x128, 140 by 128x128; cuDNN 89).
WINDOWS_WORKSPACE = ((64, 192, "cooperative", 4, (1, 1), 450, 8000, 0),)
# The same of operands that TMA cannot take as they lie in memory (64 x 29 x 3653, nt: 108 us without shares), with eight
# producer warps. (In groups of 8, not along Hilbert's curve: seven products of `choice_before.json` take 0.81 to 0.98 of the
# time, 128 x 1128 x 9591 in 14 shares 55 us and 68.)
UNALIGNED_WORKSPACE = (
    (128, 128, "cooperative", 8, (1, 1), 3600, 8000, 0, 8),
    (64, 64, "cooperative", 4, (1, 1), 2800, 8000, 0, 8),
)

# Where producer warps stage an operand in registers: it is in a layout of the user's, or transformed on the way;
STAGED = (
    (128, 256, "cooperative", 8, (1, 1), 1750, 6000, 0),
    (128, 128, "cooperative", 8, (1, 1), 1150, 4000, 0),
    (64, 64, "cooperative", 4, (1, 1), 700, 2500, 0),
    (64, 32, "cooperative", 4, (1, 1), 550, 2200, 0),
)
# or B is rewritten in place (and A perhaps transformed in the consumers' registers);
REWRITTEN = (
    (256, 128, "cooperative", 8, (1, 1), 1370, 6000, 0),
    (128, 256, "cooperative", 8, (1, 1), 1490, 6000, 0),
    (128, 128, "cooperative", 8, (1, 1), 880, 4000, 0),
    (64, 64, "cooperative", 4, (1, 1), 500, 2500, 0),
    (64, 32, "cooperative", 4, (1, 1), 420, 2200, 0),
)
# or A alone is transformed, in the consumers' registers;
TRANSFORMED = (
    (128, 256, "cooperative", 8, (1, 1), 1090, 6000, 0),
    (256, 128, "cooperative", 8, (1, 1), 1280, 6000, 0),
    (128, 128, "cooperative", 8, (1, 1), 720, 4000, 0),
    (64, 128, "cooperative", 4, (1, 1), 480, 3000, 0),
    (64, 64, "cooperative", 4, (1, 1), 430, 2500, 0),
    (64, 32, "cooperative", 4, (1, 1), 380, 2200, 0),
)
# or A, of 32-bit elements across K, is fetched by consumers as it lies (f32 4096^3 and 8192^3 on an H200, 2026-11-23: of
# cuBLAS's speed 1.05 and 1.03 by 128x256 tiles, 0.84 and 0.95 by 128x192, 0.79 and 0.78 by 256x128, 0.69 and 0.67 by
# 128x128; the smaller ones of 24 products of `bench.experiments.random_shapes`, 2026-11-28);
ACROSS = (
    (128, 256, "cooperative", 8, (1, 1), 1060, 6000, 0),
    (256, 128, "cooperative", 8, (1, 1), 1400, 6000, 0),
    (128, 192, "cooperative", 8, (1, 1), 880, 5000, 0),
    (128, 128, "cooperative", 8, (1, 1), 1000, 4000, 0),
    (64, 128, "cooperative", 4, (1, 1), 1000, 3000, 0),
    (64, 64, "cooperative", 4, (1, 1), 810, 2500, 0),
    (64, 32, "cooperative", 4, (1, 1), 700, 2200, 0),
)
# or threads start cp.async copies of it (of equal times the tall tile is the first: a contraction of 2048^3 took 55.6 us by
# it and 68.8 by 128x256, six of TCCG of 6048 and 7056 0.91 to 0.96 of the other's time);
CP_ASYNC = (
    (256, 128, "cooperative", 8, (1, 1), 1700, 3700, 0),
    (128, 256, "cooperative", 8, (1, 1), 1700, 4000, 0),
    (128, 128, "pingpong", 8, (1, 1), 1265, 1800, 2000),
    (64, 256, "pingpong", 8, (1, 1), 1400, 2000, 2000),
    (64, 128, "pingpong", 8, (1, 1), 1000, 1500, 2000),
    (64, 64, "cooperative", 4, (1, 1), 700, 2500, 0),
    (64, 32, "cooperative", 4, (1, 1), 550, 2200, 0),
)
# or its tiles are transposed in place, because tensor cores read 8- and 32-bit operands along K alone;
TRANSPOSED = (
    (256, 128, "cooperative", 8, (1, 1), 1300, 6000, 0),
    (128, 128, "cooperative", 8, (1, 1), 800, 4000, 0),
    (128, 256, "cooperative", 8, (1, 1), 1500, 6000, 0),
    (64, 128, "cooperative", 4, (1, 1), 1100, 3000, 0),
    (64, 64, "cooperative", 4, (1, 1), 860, 2500, 0),
    (64, 32, "cooperative", 4, (1, 1), 700, 2200, 0),
)
# or TMA cannot take it as it lies in memory, and it comes element by element, by eight producer warps.
UNALIGNED = (
    (128, 192, "cooperative", 8, (1, 1), 3600, 5000, 0, 8),
    (128, 128, "cooperative", 8, (1, 1), 2800, 4000, 0, 8),
    (64, 64, "cooperative", 4, (1, 1), 1500, 2500, 0, 8),
)
# A thread holds sums that are promoted twice.
PROMOTED = (
    (256, 128, "cooperative", 8, (1, 1), 1230, 6000, 0),
    (128, 128, "cooperative", 8, (1, 2), 640, 4000, 0),
    (128, 192, "cooperative", 8, (2, 1), 900, 5000, 0),
    (128, 160, "cooperative", 8, (2, 1), 760, 4500, 0),
    (64, 128, "cooperative", 4, (1, 2), 400, 3000, 0),
    (64, 64, "cooperative", 4, (1, 1), 300, 2500, 0),
)
# Tiles as wide as a product of a few columns (or of a few rows, as D^T), up to so many, by rows, schedule and warps; and
# what a k-tile takes where rows begin at lines of the L2, in cycles: those of no columns, and those of each column.
PROMOTED_WIDEST = 192
PROMOTED_FITTED = ((128, "cooperative", 8, 0, 4.7), (64, "cooperative", 4, 200, 1.56))
# The same where rows begin between lines: a line of a k-tile takes two requests. Fitted to 200 times of 10 products on an
# H200 (e4m3, 2026-11-28; off by 10 %): 144 x 14864 x 6208 takes 30.7 us by 128x144 as D^T, and 63.3 by 128x128; 5888 x 48 x
# 7712 16.0 by 64x96 in two shares as D^T, 21.1 by 64x64. A launch takes `UNALIGNED_START` whatever its tiles, and an
# exchange of sums in a cluster so many cycles, so many of each sum of a tile, and so many of each share.
UNALIGNED_FITTED = ((128, "cooperative", 8, 308, 2.98), (64, "cooperative", 4, 252, 2.2), (64, "pingpong", 8, 341, 0.56))
UNALIGNED_START, UNALIGNED_EXCHANGE = 7800, (700, 0.31, 200)
UNALIGNED_PROMOTED = (                 # M, N, schedule, warps, cluster, cycles of a k-tile; shares of K
    (128, 192, "cooperative", 8, (2, 1), 880, (1,)),
    (128, 160, "cooperative", 8, (2, 1), 785, (1,)),
    (128, 128, "cooperative", 8, (1, 2), 690, (1,)),
    (128, 128, "cooperative", 8, (1, 1), 690, (2, 4)),
    (128, 96, "cooperative", 8, (1, 1), 595, (1, 2, 4)),
    (64, 128, "pingpong", 8, (2, 1), 413, (1,)),
    (64, 128, "cooperative", 4, (1, 1), 533, (2, 4, 8)),
    (192, 64, "cooperative", 12, (1, 1), 714, (1, 2, 4)),
    (64, 96, "cooperative", 4, (1, 1), 463, (1, 2)),
    (64, 64, "cooperative", 4, (1, 1), 393, (1, 2, 4)),
)
# With block scales a thread holds sums beside totals as well. The first two are fitted to one run of many mappings in turns
# (H200, 2026-11-30; times of equal kernels differ by up to 3 %): 4096 x 7168 x 16384 takes 863 us by 256x128 and 914 by
# 128x192, 8192^3 1005 and 978, 4096 x 4096 x 7168 217 and 240. The others are of 2026-11-29, when consumers copied scales.
SCALED = (
    (256, 128, "cooperative", 8, (1, 1), 1400, 6000, 0),
    (128, 192, "cooperative", 8, (2, 1), 1035, 5000, 0),
    (128, 160, "cooperative", 8, (2, 1), 915, 4500, 0),
    (128, 128, "cooperative", 8, (1, 2), 750, 4000, 0),
    (128, 64, "cooperative", 8, (1, 1), 520, 3000, 0),
    (64, 128, "cooperative", 4, (1, 1), 510, 3000, 0),
    (64, 64, "cooperative", 4, (1, 1), 380, 2500, 0),
)
# Weights of 4 bits that consumers dequantise (swap-AB: M counts columns of B, N rows of A). Behind the cycles stand the
# bytes along K of a stage's 16-bit elements, and into how many shares blocks of a cluster may divide K. Fitted to times on
# an H200 (2026-11-30: 16 to 256 rows of the three layers of `bench.quantised`; the model's choice is the fastest of those
# tried, or within 3 % of it). Stages of 256 bytes save up to a tenth: 256 x 4096 x 14336 takes 54.8 us, 58.4 by 128.
DEQUANTISED = (
    (128, 256, "cooperative", 8, (2, 1), 1270, 4000, 0, 128, 1),
    (256, 128, "cooperative", 8, (1, 1), 1700, 4000, 0, 128, 1),
    (192, 128, "cooperative", 12, (1, 1), 1270, 4000, 0, 128, 4),
    (128, 128, "cooperative", 8, (1, 1), 784, 5450, 0, 256, 4),
    (128, 128, "cooperative", 8, (1, 1), 843, 4960, 0, 128, 4),
    (64, 128, "cooperative", 4, (1, 1), 456, 4680, 0, 256, 2),
    (192, 64, "cooperative", 12, (1, 1), 618, 8200, 0, 256, 4),
    (128, 64, "cooperative", 8, (1, 1), 490, 5000, 0, 256, 8),
    (64, 64, "cooperative", 4, (1, 1), 262, 5930, 0, 256, 4),
    (128, 32, "cooperative", 8, (1, 1), 381, 4000, 0, 256, 1),
    (64, 32, "cooperative", 4, (1, 1), 240, 5190, 0, 256, 2),
)
# The same beside 8-bit floats: a stage is 128 elements along K, whose sums are scaled. Fitted to times on an H200
# (2026-11-29 and 2026-11-30: 17 to 256 rows of the same layers).
DEQUANTISED_FLOAT8 = (
    (128, 128, "cooperative", 8, (1, 1), 1080, 5500, 0, 128, 2),
    (64, 128, "cooperative", 4, (1, 1), 638, 6810, 0, 128, 2),
    (128, 64, "cooperative", 8, (1, 1), 785, 5000, 0, 128, 2),
    (128, 32, "cooperative", 8, (1, 1), 660, 4400, 0, 128, 2),
    (64, 64, "cooperative", 4, (1, 1), 472, 5580, 0, 128, 2),
)
# Both by way of a workspace: along a long K it fills the multiprocessors, on which clusters of four leave a tenth idle.
DEQUANTISED_WORKSPACE = (
    (128, 256, "cooperative", 8, (2, 1), 1354, 14160, 0, 128),
    (128, 128, "cooperative", 8, (2, 1), 753, 10400, 0, 256),
    (192, 64, "cooperative", 12, (1, 1), 616, 10850, 0, 256),
    (192, 32, "cooperative", 12, (1, 1), 513, 9260, 0, 256),
)
DEQUANTISED_FLOAT8_WORKSPACE = (
    (128, 128, "cooperative", 8, (2, 1), 1029, 12500, 0, 128),
    (192, 64, "cooperative", 12, (1, 1), 1040, 10500, 0, 128),
    (192, 32, "cooperative", 12, (1, 1), 875, 8600, 0, 128),
)
# Beside these, for the tuner: tiles by TMA that were the fastest of none of the shapes that the others were fitted to.
EXTRA = (
    (256, 64, "cooperative", 8, (1, 1), 560, 4000, 0),
    (64, 256, "pingpong", 8, (1, 1), 560, 1800, 2000),
    (64, 256, "cooperative", 4, (1, 1), 560, 4000, 0),
)
# An algebra's kernel is asked on this one how its operands travel.
LIKELY_OF_ALGEBRAS = (64, 32, "cooperative", 4, (1, 1), 0, 0, 0)

# -- the multistage kernel --------------------------------------------------------------------------------------------
#
# A row: a block's tile (M, N, K), a warp's (M, N), stages, blocks a multiprocessor; nanoseconds of a k-tile where as many
# blocks as fit share the multiprocessor (neither operand is copied across, A is, B is, both are), of a block that is alone,
# and of a launch; 0 where no registers are left to merge sums of blocks that share K, 1 where there are, 2 where K is
# streamed, too; and a thread's part on the ordinary units where it is not (4, 8).

ORDINARY = (                           # float32
    ((128, 128, 16), (64, 32), 3, 2, (1254, 1326, 1340, 1375), 1330, 10500, 0, (8, 4)),
    ((64, 128, 16), (32, 64), 4, 3, (639, 665, 696, 758), 720, 11000, 2),
    ((128, 64, 16), (64, 32), 4, 3, (638, 727, 667, 763), 730, 11000, 1, (8, 4)),
    ((64, 64, 16), (32, 32), 4, 4, (355, 395, 438, 438), 450, 3500, 2),
    ((32, 64, 32), (16, 32), 3, 4, (420, 479, 511, 572), 535, 2400, 2),
    ((64, 32, 32), (32, 16), 3, 4, (416, 533, 471, 592), 620, 2400, 2, (8, 4)),
    ((32, 32, 32), (16, 16), 3, 6, (269, 350, 334, 404), 355, 2300, 2),
)
# float64 and tf32 were fitted to 1600 times of 41 products by 47 tiles on an H200 (2026-11-29), and to those of
# `bench.experiments.random_shapes`; a tile's times are off by 10 %. Between the powers of two stand tiles that leave less
# empty: 96 x 14384 x 664 in float64 takes 42 us by 96 rows and 56 by 128, 9642 x 40 x 832 30 us by 40 columns and 51 by 64.
# Whether tf32 is copied in words decides the larger tiles: 2624 x 2464 x 5167 takes 702 us by 128x256, 1147 by 64x128.
DOUBLE = (                             # float64, by DMMA: nothing is copied across, yet the order of A decides how warps lie
    ((128, 128, 32), (32, 64), 3, 1, (2219, 2260, 2219, 2260), 2219, 4000, 2),
    ((128, 128, 32), (64, 32), 3, 1, (2260, 2219, 2260, 2219), 2219, 4000, 2),
    ((96, 128, 32), (48, 32), 3, 1, (1759,) * 4, 1759, 3300, 1),
    ((64, 128, 32), (32, 32), 3, 1, (1227,) * 4, 1227, 2600, 2),
    ((128, 64, 32), (32, 32), 3, 1, (1203,) * 4, 1203, 2600, 1),
    ((96, 96, 16), (48, 48), 3, 2, (880, 723, 880, 723), 776, 2600, 2),
    ((64, 96, 16), (32, 48), 3, 3, (477,) * 4, 579, 2500, 1),
    ((64, 64, 16), (32, 32), 3, 3, (302,) * 4, 400, 2500, 1),
    ((32, 128, 16), (32, 32), 3, 3, (329,) * 4, 467, 2500, 1),
    ((64, 40, 16), (16, 40), 3, 4, (260,) * 4, 363, 2100, 1),
    ((32, 32, 32), (16, 16), 3, 4, (255,) * 4, 345, 2000, 2),
)
TF32 = (                               # float32 as tf32, by mma.sync
    ((128, 256, 32), (64, 64), 3, 1, (1379,) * 4, 1379, 2600, 2),
    ((128, 128, 32), (64, 32), 3, 1, (821,) * 4, 821, 2100, 2),
    ((128, 128, 16), (64, 64), 4, 2, (350,) * 4, 502, 2000, 1),
    ((64, 128, 32), (32, 64), 3, 2, (442,) * 4, 641, 1600, 2),
    ((128, 64, 16), (64, 32), 4, 3, (256,) * 4, 364, 1600, 1),
    ((64, 64, 32), (32, 32), 3, 4, (286,) * 4, 396, 1700, 2),
    ((32, 64, 32), (16, 32), 3, 4, (212,) * 4, 304, 1650, 2),
    ((64, 32, 32), (32, 16), 3, 4, (215,) * 4, 324, 1600, 1),
    ((16, 64, 64), (16, 16), 5, 2, (425,) * 4, 220, 915, 2),
    ((16, 32, 128), (16, 8), 4, 1, (550,) * 4, 310, 1200, 2),
)
# ns that an element of D takes to be stored, a wave, by the block's tile: of rows that begin at multiples of 16 bytes, and
# of others. Where K is short this is most of the time (float64 on an H200: 14585 x 2128 x 26 takes 81 us by tiles of
# 64 x 64, of which three a multiprocessor store side by side, and 120 to 134 by larger ones).
DOUBLES_STORED = {(128, 128, 32): (0.31, 0.52), (96, 128, 32): (0.21, 0.38), (64, 128, 32): (0.21, 0.45),
                  (128, 64, 32): (0.3, 0.36), (96, 96, 16): (0.25, 0.48), (64, 96, 16): (0.21, 0.69),
                  (64, 64, 16): (0.17, 0.34), (32, 128, 16): (0.26, 0.45), (64, 40, 16): (0.31, 0.39),
                  (32, 32, 32): (0.28, 0.34)}
TF32_STORED = {(128, 256, 32): (0.25, 0.39), (128, 128, 32): (0.2, 0.23), (128, 128, 16): (0.15, 0.22),
               (64, 128, 32): (0.15, 0.46), (128, 64, 16): (0.14, 0.45), (64, 64, 32): (0.24, 0.28),
               (32, 64, 32): (0.26, 0.3), (64, 32, 32): (0.37, 0.43), (16, 64, 64): (1.04,) * 2, (16, 32, 128): (1.67,) * 2}
TF32_COPIED = 0.1                      # ns of an element of a k-tile whose rows do not begin at multiples of 16 bytes
COMPLEX64 = (
    ((128, 128, 8), (32, 64), 4, 1, (2550, 2550, 2550, 2680), 2550, 8000, 0),
    ((64, 64, 16), (32, 32), 3, 3, (1530, 1530, 1530, 1580), 2290, 4700, 2),
    ((32, 64, 16), (16, 32), 3, 4, (710, 710, 710, 735), 740, 5000, 2),
    ((32, 32, 16), (16, 16), 3, 4, (385, 385, 385, 400), 390, 2000, 2),
)
COMPLEX128 = (
    ((64, 64, 8), (16, 64), 4, 2, (565,) * 4, 720, 4500, 0),
    ((32, 64, 16), (16, 32), 3, 2, (611,) * 4, 800, 2300, 2),
    ((32, 32, 16), (16, 16), 3, 3, (348,) * 4, 430, 2200, 2),
)
HALF = (                               # float16 and bfloat16 by mma.sync, where there is no wgmma
    ((128, 256, 64), (64, 64), 3, 1, (1220,) * 4, 1220, 4000, 2),
    ((128, 128, 32), (64, 64), 4, 2, (397,) * 4, 500, 3500, 2),
    ((64, 64, 64), (32, 32), 3, 4, (240,) * 4, 400, 2500, 2),
    ((32, 64, 64), (16, 32), 3, 4, (160,) * 4, 350, 2500, 2),
    ((16, 64, 128), (16, 16), 5, 2, (200,) * 4, 400, 2500, 2),
)
SKINNY = (((16, 32, 256), (16, 8), 4, 1, (1900,) * 4, 1900, 2500, 2),)       # of a few rows of A
# Of 16-bit floats on Hopper whose rows TMA cannot take, as fast as they multiply (`gemmkit.tuning.candidates`).
GATHERED = (
    ((128, 256, 64), (64, 64), 3, 1, (1370,) * 4, 1370, 1310, 2),
    ((128, 128, 32), (64, 64), 4, 2, (351,) * 4, 442, 1310, 2),
    ((64, 64, 64), (32, 32), 3, 4, (288,) * 4, 480, 1310, 2),
    ((32, 64, 64), (16, 32), 3, 4, (171,) * 4, 375, 1310, 2),
    ((16, 64, 128), (16, 16), 5, 2, (226,) * 4, 452, 1310, 2),
    ((16, 32, 256), (16, 8), 4, 1, (460,) * 4, 460, 1310, 0),
)
# Of contractions in boxes of K. The first two steps were measured, the others follow from the number of their pieces.
BOXES = (
    ((128, 256, 64), (64, 64), 3, 1, (2420,) * 4, 2420, 4000, 1),
    ((128, 192, 64), (64, 48), 4, 1, (2100,) * 4, 2100, 4000, 2),
    ((128, 128, 64), (64, 32), 3, 1, (1690,) * 4, 1690, 4000, 1),
    ((64, 64, 64), (32, 32), 3, 4, (845,) * 4, 1000, 2500, 2),
)

# -- the single-stage kernel ------------------------------------------------------------------------------------------

# (block M, N, K), (warp M, N), blocks a multiprocessor: from the fastest on a large problem to the smallest. Measured on an
# H100 (gemm.json of commit 8a81beb4): with one stage, latency is hidden by a large tile or by several blocks side by side.
TENSOR_TILES = (
    ((128, 256, 128), (64, 64), 1),
    ((128, 128, 128), (64, 32), 2),
    ((64, 128, 128), (32, 64), 2),
    ((64, 64, 128), (32, 32), 4),
    ((32, 64, 64), (16, 32), 4),
    ((32, 32, 64), (16, 16), 4),
)
# Of float64, whose elements take four times the room: warps of 32 x 32, and as many of them as registers allow.
DOUBLE_TILES = (
    ((64, 64, 32), (32, 32), 3),
    ((64, 32, 32), (32, 16), 4),
    ((32, 32, 32), (16, 16), 4),
)
SIDE_BY_SIDE = {(64, 64, 64): 3}       # blocks a multiprocessor where blocks share K, if not those listed
# On the ordinary units a warp's tile is the operator's, and the block's follows from it.
FPU_TILES = {
    (64, 32): (((64, 128, 32), 4),),
    (32, 16): (((64, 64, 64), 2),),
    (32, 32): (((64, 64, 32), 4), ((32, 32, 32), 4)),
    (16, 16): (((32, 32, 32), 4),),
}
# A thread's part of an operation of a warp there.
LANES = {(64, 32): (8, 4), (32, 16): (8, 4), (32, 32): (8, 4), (16, 16): (4, 8)}
