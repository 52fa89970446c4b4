export(PoolIntArray) var discrete_choices = PoolIntArray()


func _get_configuration_warning() -> String:
	return load("res://addons/envmanager/checks.gd").warnings_of(self).join("\n")
