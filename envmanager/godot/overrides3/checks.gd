static func _is_played(root: Node) -> bool:
	var main = ProjectSettings.get_setting("application/run/main_scene")
	return root.filename in ["", main] or main in [null, ""]
