"""KVzip beside kvpress' own: the same token ids, the same part kept; scores, bytes held, decoding speed."""
