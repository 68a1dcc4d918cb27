"""The only place for client, peer and server transports; everything else speaks to the ports in links.port."""
