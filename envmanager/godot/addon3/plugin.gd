tool
extends EditorPlugin
# Adds the bridge to the project's autoloads while the plugin is enabled, says in the inspector what is missing, and
# puts policies into exported games.

const NAME = "EnvManager"
const Inspector = preload("res://addons/envmanager/inspector.gd")
const Exports = preload("res://addons/envmanager/exports.gd")

var _inspector: Inspector = Inspector.new()
var _exports: Exports = Exports.new()


func enable_plugin() -> void:
	if not ProjectSettings.has_setting("autoload/" + NAME):
		add_autoload_singleton(NAME, "res://addons/envmanager/bridge.gd")


func disable_plugin() -> void:
	remove_autoload_singleton(NAME)


func _enter_tree() -> void:
	add_inspector_plugin(_inspector)
	add_export_plugin(_exports)
	var _error = get_editor_interface().get_inspector().connect("property_edited", self, "_check_again")


func _exit_tree() -> void:
	remove_inspector_plugin(_inspector)
	remove_export_plugin(_exports)
	get_editor_interface().get_inspector().disconnect("property_edited", self, "_check_again")


# The engine does not ask again for a node's warning when a field of it has changed.
func _check_again(_property: String) -> void:
	for node in get_editor_interface().get_selection().get_selected_nodes():
		node.update_configuration_warning()
