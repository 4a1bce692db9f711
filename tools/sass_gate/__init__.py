"""The machine code of a sample of kernels, written down, so that a change that should not touch it can be seen not to.

A rewrite of the kernels' text must leave registers, spills and the histogram of instructions as they are. The order of
instructions may change, since ptxas schedules by what it meets first: loops that differ are listed, and do not fail.

    python -m tools.sass_gate check                    against `stored.json`, in minutes and without a GPU (make gate)
    python -m tools.sass_gate check --update           the same, and keeps what is found
    python -m tools.sass_gate write OUT.json           with all lines of the loops
    python -m tools.sass_gate compare A.json B.json    what differs between two such files; --lines shows the lines
    python -m tools.sass_gate compare --commit REV     the same against another commit, compiled in a worktree of its own

The exit status is 0 where registers, spills and histograms are equal, 1 where they are not, and 2 where the compilers of the
two sides differ, for then nothing can be compared.
"""
