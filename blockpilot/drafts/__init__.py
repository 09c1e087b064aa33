"""What proposes: the DFlash network, its checkpoint format, blocks at many anchors."""
