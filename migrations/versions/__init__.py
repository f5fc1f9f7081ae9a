"""One file a package until the first release; from then on one small file a change."""
