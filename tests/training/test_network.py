"""Gloo uses the interface that the nodes know each other by."""

from collections import namedtuple

import psutil

from raytune70b.training.network import interface_of

Address = namedtuple("Address", "address")


def test_the_interface_with_the_nodes_address():
    interfaces = {"lo": [Address("127.0.0.1"), Address("::1")], "eth0": [Address("10.0.0.1")], "ib0": [Address("10.1.0.1")]}
    assert interface_of("10.0.0.1", interfaces) == "eth0"
    assert interface_of("127.0.1.1", interfaces) is None
    assert interface_of("127.0.0.1", psutil.net_if_addrs()) is not None
