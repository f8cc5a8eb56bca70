"""Why a job has no plan or not another plan, and the nearest changes that would give it one."""
