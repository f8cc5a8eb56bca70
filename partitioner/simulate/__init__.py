"""The time and the memory of an emitted program under the cost model."""
