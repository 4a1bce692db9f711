"""From PTX to a launched kernel, and from the user's arrays to pointers.

    device.py    what GPU there is, what it allows, what the driver takes for a launch; processes that forked
    compile.py   a specialised kernel -> PTX (Numba, NVVM) -> cubin (ptxas, else the driver), with the registers and spills
                 that it took; disassembly
    cache.py     cubins kept in memory and on disk, by the text of their key; whose files are believed
    launch.py    cubin -> a kernel launched in about two microseconds; workspaces
    tensor_maps.py  operands as TMA takes them
    arrays.py    CuPy, PyTorch, Numba, NumPy and other arrays -> pointer, shape, strides, dtype; new arrays
    streams.py   the current stream of each library, and any stream -> handle (also to be had from arrays.py)

Importing the package touches no driver and needs no GPU. Nothing here knows of tiles, layouts or products.
"""
