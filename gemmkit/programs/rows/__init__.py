"""Programs of whole rows without rounds: functions of rows, on the kernels of `gemmkit.kernels.rows`."""
