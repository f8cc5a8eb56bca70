"""The cost model: seconds and bytes of a block's call (`call`) and of a whole step (`step`)."""
