"""Diagnostics of attention: where its weights go, how loud its reads are, and what junk in the quiet ones costs."""
