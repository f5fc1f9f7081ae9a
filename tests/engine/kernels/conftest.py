"""The kernels' tests run on the device where there is one, and in Triton's interpreter otherwise: the
root `conftest` sets the switch before anything imports Triton.
"""
