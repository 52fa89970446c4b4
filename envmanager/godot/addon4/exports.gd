@tool
extends EditorExportPlugin
## Puts the policies of a project into the exported game: the editor exports resources alone, and these are plain files.

const SUFFIX := "policy"


func _get_name() -> String:
	return "EnvManager"


func _export_begin(_features: PackedStringArray, _is_debug: bool, _path: String, _flags: int) -> void:
	_add_below("res://")


func _add_below(folder: String) -> void:
	var entries := DirAccess.open(folder)
	if entries == null or entries.file_exists(".gdignore"):
		return
	for file in entries.get_files():
		if file.get_extension() == SUFFIX:
			add_file(folder.path_join(file), FileAccess.get_file_as_bytes(folder.path_join(file)), false)
	for each in entries.get_directories():  # hidden ones are not listed
		_add_below(folder.path_join(each))
