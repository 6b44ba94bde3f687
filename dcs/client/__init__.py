"""The part of dcs that other packages use; the only one that they may import."""

from dcs.client.client import DcsClient
from dcs.client.control import DcsControl
from dcs.client.values import Head, SliceData
from dcs.codec import FULL, Pulled
from dcs.rules.line import POLICY

__all__ = ["FULL", "POLICY", "DcsClient", "DcsControl", "Head", "Pulled", "SliceData"]
