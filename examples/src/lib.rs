//! Numbered examples of the toolkit, from the first message on; each is a binary that runs on the soft device with one command.
