"""Measure the machine at hand and describe it as a topology that plans can use."""

from partitioner.profile.fit import FitError
from partitioner.profile.run import Profile, profile

__all__ = ["FitError", "Profile", "profile"]
