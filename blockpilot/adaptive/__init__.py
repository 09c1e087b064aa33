"""Adaptation while decoding: the pace of steps, back-off from speculation, calibration of forecasts."""
