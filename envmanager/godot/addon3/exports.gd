tool
extends EditorExportPlugin
# Puts the policies of a project into the exported game: the editor exports resources alone, and these are plain files.

const SUFFIX = "policy"


func _export_begin(_features: PoolStringArray, _is_debug: bool, _path: String, _flags: int) -> void:
	_add_below("res://")


func _add_below(folder: String) -> void:
	var entries = Directory.new()
	if entries.open(folder) != OK or entries.file_exists(".gdignore"):
		return
	entries.list_dir_begin(true, true)
	var entry = entries.get_next()
	while entry != "":
		var path = folder.plus_file(entry)
		if entries.current_is_dir():
			_add_below(path)
		elif entry.get_extension() == SUFFIX:
			var file = File.new()
			if file.open(path, File.READ) == OK:
				add_file(path, file.get_buffer(file.get_len()), false)
		entry = entries.get_next()
