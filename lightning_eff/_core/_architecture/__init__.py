"""The way in of techniques whose purpose is other parameters: layers swapped, maps of another form, adapters."""
