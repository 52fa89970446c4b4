extends RefCounted
## What a scene declares about its training: the resources that its arena and its agents refer to.


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
