"""A stream and event device API, and the backends behind it. Schemes see only `api`."""
