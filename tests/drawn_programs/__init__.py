"""Programs drawn from a grammar: each is right, or refused with a line of the program; nothing else passes.

| module | what |
|---|---|
| ``syntax`` | programs as a small tree, and their Python source with one statement a line |
| ``grammar`` | draws a program, its arrays' sizes and types, its numbers and a mapping, and sometimes a slip |
| ``pieces`` | a chain in tiles of several stacks, and of rows that are packed, with their offsets |
| ``numbers`` | computes the tree with NumPy in float64, and beside each value a bound of what a kernel's may be off |
| ``judge`` | runs the source in the emulator, as compiled PTX or on a GPU, and says whether what came of it may pass |
| ``shrink`` | a smaller program that fails in the same way |

``numbers`` shares no code with gemmkit: neither with the tracer nor with ``Program.reference``.

``python -m tests.drawn_programs --count 1000 --seed 1`` draws, judges and counts them.
"""
