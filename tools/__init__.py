"""Tools for those who work on gemmkit itself; nothing here is installed."""
