"""Epilogues: what happens to D between shared and global memory."""

from gemmkit.epilogues.base import Default, Epilogue
from gemmkit.epilogues.library import Bias, LinearCombination

__all__ = ["Bias", "Default", "Epilogue", "LinearCombination"]
