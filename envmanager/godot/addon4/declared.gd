extends RefCounted
## What a scene declares about its training: the resources that its arena and its agents refer to.

const FIELDS := {"settings": "EnvManagerBehavior", "training": "EnvManagerTraining"}


## The settings and trainings to which the nodes of a scene refer, and which Godot has left out. `root` is its root.
static func lost_in(scene: PackedScene, root: Node) -> Array:
	var state := scene.get_state()
	var missing := _missing_in(scene)
	var found := []
	for i in state.get_node_count():
		var node := root.get_node_or_null(state.get_node_path(i))
		if node == null:
			continue
		if state.get_node_instance(i) != null:
			found += lost_in(state.get_node_instance(i), node)
		for j in state.get_node_property_count(i):
			var field = str(state.get_node_property_name(i, j))
			if not FIELDS.has(field) or not "_bridge" in node or node.get(field) != null:
				continue
			var what := "%s of node %s in %s" % [field, path_of(node), scene.resource_path]
			if state.get_node_property_value(i, j) != null:
				found.append("%s refers to something that is no %s" % [what, FIELDS[field]])
			elif missing != []:
				found.append("%s could not be loaded, because %s is not there" % [what, missing[0]])
	return found


# The files that a scene names and that are not there.
static func _missing_in(scene: PackedScene) -> Array:
	var missing := []
	for dependency in ResourceLoader.get_dependencies(scene.resource_path):
		var path = dependency.substr(dependency.find("res://"))
		if not ResourceLoader.exists(path):
			missing.append(path)
	return missing


## The fields of a resource that are set, and where it is: the file, and the node that refers to it.
static func told_by(node: Node, resource: Resource) -> Dictionary:
	var file := resource.resource_path.split("::")[0]
	return {"node": path_of(node), "file": file if file != "" else file_of(node), "fields": fields_of(resource)}


## The path of a node in its scene, from the root on.
static func path_of(node: Node) -> String:
	var path := str(node.name)
	while node.get_parent() != null and node.get_parent().get_parent() != null:
		node = node.get_parent()
		path = str(node.name) + "/" + path
	return path


static func file_of(node: Node) -> String:
	while node != null and node.scene_file_path == "":
		node = node.get_parent()
	return "" if node == null else node.scene_file_path


## The fields that are not as the script of the resource has them.
static func fields_of(resource: Resource) -> Dictionary:
	var fields := {}
	var script: Script = resource.get_script()
	if script == null:
		return fields
	var untouched: Resource = script.new()
	for property in resource.get_property_list():
		if property.usage & PROPERTY_USAGE_SCRIPT_VARIABLE:
			var value = resource.get(property.name)
			if not _is_same(value, untouched.get(property.name)):
				fields[property.name] = _told(value)
	return fields


static func _is_same(value, other) -> bool:
	return typeof(value) == typeof(other) and [value].hash() == [other].hash()


static func _told(value):
	if value is Resource:
		return fields_of(value)
	if not value is Array:
		return value
	var list := []
	for each in value:
		list.append(_told(each))
	return list
