"""Several models behind one API: names, and the model that answers a request."""
