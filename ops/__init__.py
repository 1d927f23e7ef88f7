"""The vocabulary models are written in. Importing it registers the native lowerings that this installation has."""

import inferax.ops.cpu  # noqa: F401
