# Without: _dock, _move_beside_inspector


func _enter_tree() -> void:
	add_inspector_plugin(_inspector)
	add_export_plugin(_exports)
	get_editor_interface().get_inspector().connect("property_edited", self, "_check_again")


func _exit_tree() -> void:
	remove_inspector_plugin(_inspector)
	remove_export_plugin(_exports)
	get_editor_interface().get_inspector().disconnect("property_edited", self, "_check_again")
