# Without: _get_name


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
