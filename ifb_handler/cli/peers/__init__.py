"""Scripts that run a workload on one system each, ours among them, with that system's own Python.

They import nothing of this package (but for `drive_ours`, which measures it): `peer_protocol` and `stream_client` lie
beside them and need the standard library only.
"""
