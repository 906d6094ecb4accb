"""Templates of TorchServe's configuration files, installed as `ifb_handler.config`."""
