"""The link as seen from transfers that happened anyway: arithmetic only, sends nothing, opens no socket."""
