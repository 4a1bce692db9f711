"""An interpreter of PTX in NumPy: is what Numba and NVVM made of a kernel right?

The emulator runs a kernel's Python; this runs what was compiled of it, without a GPU. All threads of a launch go in step: a register
is an array with a value a thread, an instruction a few calls of NumPy.

| file | what |
|---|---|
| `parser` | PTX text as data |
| `kinds` | types of values |
| `machine` | registers, control flow, barriers |
| `memory` | bytes that know whether they may be read and written |
| `registry` | where instructions are entered |
| `integers`, `bits`, `floats`, `comparison`, `conversion` | instructions that make values of values; `rounding` has what is rounded once |
| `transfers` | moves, loads, stores, addresses |
| `mbarriers` | barriers that count bytes, and stores to other blocks of a cluster |
| `warps`, `matrices` | what lanes do together; matrix instructions are gemmkit's atoms |
| `launch` | `run_ptx`, and plans run by their PTX |
| `__main__` | drawn products, compared with the emulator and NumPy |

What it checks: bounds and alignment to the byte, reads of memory that nothing wrote, threads that part at a barrier or at an
instruction of a warp. What it cannot: races (threads go in step), waits for asynchronous copies that are missing (the copies are
made at once), registers and speed. An instruction that it does not have is an error with its line, never passed over.
"""
