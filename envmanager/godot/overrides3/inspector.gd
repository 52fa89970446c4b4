func parse_property(object: Object, _type: int, name: String, _hint: int, _text: String, _usage: int) -> bool:
	return name in Checks.SIZES and not Checks.uses_sizes(object)
