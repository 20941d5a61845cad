"""Elastic runs: processes that come and go, their generations, and the launcher that forms them."""
