"""Tables of rows: read from files and the hub, converted from known formats, or streamed."""
