# Godot 3 does not tell which arguments have defaults: all must be given.
static func _wrong_call(request: Dictionary, n: int, arena: Node) -> String:
	if request.get("kwargs"):
		return "GDScript has no arguments by name"
	var takes = -1
	for method in arena.get_method_list():  # a script comes before those that it extends
		if method.name == request["method"]:
			takes = method.args.size()
			break
	if takes < 0:
		return "the arena has no method '%s'" % request["method"]
	if n != takes:
		return "method '%s' takes %d arguments, not %d" % [request["method"], takes, n]
	return ""
