"""The source's training recipe at toy scale: target and MTP, then DFlash, then every method from that DFlash."""
