"""SmolLM2-135M-Instruct with an MTP module, a DFlash drafter and DMTP of its own, trained on one CPU core."""
