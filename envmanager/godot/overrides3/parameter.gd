# Without: _validate_property
