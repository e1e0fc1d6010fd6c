"""DeepSeek-V4.1-Flash text model: checkpoint, layers and decoder."""
