"""Bytes on disk <-> arrays, one format a module. Nothing here needs the compiled core."""
