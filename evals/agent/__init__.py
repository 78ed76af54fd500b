"""Recorded tool calls replayed through a memory, with the policies of the tool loop off and on."""
