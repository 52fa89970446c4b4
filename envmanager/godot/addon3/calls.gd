extends Reference
# What a trainer asks of arenas by name: to call a method, to get or set a property.


# {"values": [one per arena]}, or an error with a "message".
static func answer(request: Dictionary, copies: Array) -> Dictionary:
	var values = []
	var args = request["args"] if request.get("args") != null else []
	for i in request["arenas"].size():
		var arena = copies[int(request["arenas"][i])].arena
		var wrong = _wrong(request, args, arena)
		if wrong != "":
			var script = arena.get_script().resource_path
			return {"message": wrong, "script": script, "line": null, "function": null, "arena": arena.index}
		if request.has("method"):
			values.append(arena.callv(request["method"], args))
		elif request.has("get"):
			values.append(arena.get(request["get"]))
		else:
			arena.set(request["set"], args[i])
			values.append(null)
	return {"values": values}


static func _wrong(request: Dictionary, args: Array, arena: Node) -> String:
	if request.has("render"):
		return "nothing can be rendered: without a window the engine has no renderer, with one you see it"
	if request.has("method"):
		return _wrong_call(request, args.size(), arena)
	var property = request["get"] if request.has("get") else request["set"]
	if not property in arena:
		return "the arena has no property '%s'" % property
	if request.has("set") and args.size() != request["arenas"].size():
		return "%d values for %d arenas" % [args.size(), request["arenas"].size()]
	return ""


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
